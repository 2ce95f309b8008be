"""Softmax attention: definition.py defines it, kernels compute it, choose.py picks a kernel."""
