"""CUDA graphs of steps: recorded once for some sizes, then launched as a whole or piece by piece."""
