"""Trials of a running server: faults and operators' moves under load, and what its clients lose by them.

Everything that is done and asked follows from one seed. Each request has been answered once before, and every later
answer to it is compared with that one: text, end, log probabilities and usage of each choice.
"""
