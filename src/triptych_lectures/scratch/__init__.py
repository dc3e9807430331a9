"""Transformers from scratch, in NumPy alone: programs to read and to run.  `numpy_transformer` and `numpy_panels` are
complete in one file each; the other two import from `numpy_transformer`.

numpy_transformer   a decoder as Llama has it, its backward written by hand, and AdamW
numpy_autograd      reverse-mode differentiation in a page, which trains that decoder without the backward
numpy_panels        an encoder, a decoder with a cache, an encoder-decoder with cross-attention, and beam search
numpy_flash         FlashAttention's tiles, forward and backward, which count what they move between memories
"""
