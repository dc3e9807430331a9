"""Transformers from scratch, in NumPy alone: files to read, each of which runs by itself.

numpy_transformer   a decoder as Llama has it, its backward written by hand, and AdamW
numpy_autograd      reverse-mode differentiation in a page, which trains that decoder without the backward
numpy_panels        an encoder, a decoder with a cache, an encoder-decoder with cross-attention, and beam search
numpy_flash         FlashAttention's tiles, forward and backward, which count what they move between memories
"""
