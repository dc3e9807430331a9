"""Training in several processes, on torch's own distribution: FSDP2, tensor parallelism, torchrun.

`docs/concepts/parallel.md` says how a run is divided and what stays equal on every mesh.
"""
