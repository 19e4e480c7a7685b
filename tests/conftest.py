"""Run before any test is collected."""

from cluster.waiting import give_children_their_signals

give_children_their_signals()  # tests stop what they start with SIGINT, and may themselves run as a background job
