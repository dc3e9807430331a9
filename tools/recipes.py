"""Writes the tables of docs/concepts/recipes.md from the settings that check a recipe: `python tools/recipes.py`."""

from pathlib import Path

from triptych.train.new_recipe import in_markdown

PAGE = Path(__file__).parents[1] / "docs" / "concepts" / "recipes.md"
BEGIN, END = "<!-- keys, written by tools/recipes.py -->\n", "<!-- end of keys -->\n"

if __name__ == "__main__":
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{in_markdown()}\n{END}{after}", encoding="utf-8")
