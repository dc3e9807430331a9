"""Data that the labs make: drawn scenes, spoken digits, a second language."""
