"""The workers as decisions see them: which there are, what is booked on each, and both as arrays."""
