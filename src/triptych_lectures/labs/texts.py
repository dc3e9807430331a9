"""The table of the labs, `labs.toml`: what of each does not depend on what is measured."""

from pathlib import Path

from triptych.files import tables_of

TEXTS = tables_of(Path(__file__).with_name("labs"))
