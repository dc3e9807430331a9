"""Models behind HTTP: each in a thread of its own (`worker`), and in front of them the routes of the APIs in use."""
