"""How many workers of which role there should be: demand, prediction and decision. No I/O and no clock."""
