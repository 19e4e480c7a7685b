"""Kernels of our own for CPUs, built from C++ at first start and called through ctypes."""
