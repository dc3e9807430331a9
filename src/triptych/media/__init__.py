"""Audio and images as arrays that a model reads.  Needs no torch."""
