"""CUDA graphs of steps that only decode: recorded once for each batch size, then launched as a whole."""
