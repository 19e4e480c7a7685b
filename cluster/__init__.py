"""Worker processes and their Ray actors, pools, autoscaler and the launcher."""
