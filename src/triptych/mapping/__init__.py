"""Between a file's words and ours: typed config keys, GGUF metadata, and reversible tables of tensor names.

What each family says in these terms stands in `triptych.families`.  Nothing here imports torch.
"""
