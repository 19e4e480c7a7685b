"""What makes a model fast on a GPU: Triton kernels for the small operations between products and attention."""
