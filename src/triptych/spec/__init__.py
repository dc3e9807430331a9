"""What a model is, as plain data.  Nothing here imports torch."""
