"""The workers as decisions see them: who is there, what is booked on each, and both as arrays."""
