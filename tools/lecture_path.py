"""The page of docs/learn/path.md: for each lecture an order of concepts, with pages, labs, exercises and chapters.

The order is in `[path]` of lectures.toml.  Pages and labs are those of the concepts' entries, so that a lab added to
a concept stands on the path too; concepts that no step of a lecture names follow at the end.
"""

from collections.abc import Iterable, Iterator
from typing import Any

Plain = dict[str, Any]

HEADER = ["| | concept | read | run | examples and exercises |", "| ---: | --- | --- | --- | --- |"]


def path_page(data: Plain) -> str:
    """The whole of path.md.  Raises KeyError for a concept or a correction that has no entry."""
    path = data["path"]
    parts = ["<!-- Made by `make lectures` from lectures.toml. -->", path["opening"].strip()]
    for name, lecture in path["lecture"].items():
        parts += lecture_parts(name, lecture, data)
    if rest := [name for name in data["concept"] if name not in named_concepts(path)]:
        parts += ["## Further concepts", table([{"concept": name} for name in rest], data)]
    return "\n\n".join(parts) + "\n"


def named_concepts(path: Plain) -> set[str]:
    """The concepts that a lecture's steps name."""
    return {step["concept"] for lecture in path["lecture"].values() for step in lecture["steps"]}


def lecture_parts(name: str, lecture: Plain, data: Plain) -> Iterator[str]:
    """The section of one lecture."""
    yield f"## {name}: {lecture['title']} {{ #{name.lower()} }}"
    yield lecture["about"].strip()
    yield table(lecture["steps"], data)
    chapters = ", ".join(f"“{chapter}”" for chapter in lecture["live"])
    rows = [
        f"- **Notebook:** [{lecture['notebook']}](../notebooks/{lecture['notebook']}.ipynb)",
        f"- **On the live page:** the chapters {chapters}",
    ]
    corrected = [linked("correction", one, data["correction"][one]["title"]) for one in lecture["corrections"]]
    rows += [f"- **Corrections:** {'; '.join(corrected)}"] if corrected else []
    yield "\n".join(rows)


def table(steps: Iterable[Plain], data: Plain) -> str:
    """A row for each step."""
    rows = []
    for number, step in enumerate(steps, 1):
        name = step["concept"]
        entry = data["concept"][name]
        run = [*(f"lab [{lab}](../lectures.md#lab-{lab})" for lab in labs(entry)), *other_commands(entry)]
        tries = [linked("example", one, f"example {one}") for one in step.get("examples", [])]
        tries += [linked("exercise", one, one) for one in step.get("exercises", [])]
        pages = [link for link in entry.get("read", []) if "](#" not in link]
        read = map(from_learn, pages or data["path"]["read"].get(name, []))
        cells = [str(number), linked("concept", name, entry["title"]), *map(", ".join, (read, run, tries))]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([*HEADER, *rows])


def labs(entry: Plain) -> list[str]:
    """The names of an entry's labs, each once."""
    return list(dict.fromkeys(lab.partition(":")[0] for lab in entry.get("labs", [])))


def other_commands(entry: Plain) -> Iterator[str]:
    """The commands of an entry that run no lab."""
    for command in entry.get("run", []):
        if not command.startswith("triptych lab "):
            yield f"`{command.replace('|', chr(92) + '|')}`"


def linked(kind: str, name: str, title: str) -> str:
    """A link to the entry on the lectures' page."""
    return f"[{title}](../lectures.md#{kind}-{name.lower().replace('.', '-')})"


def from_learn(link: str) -> str:
    """A link as it stands on lectures.md, `[title](target)`, as it stands in docs/learn/."""
    title, _, target = link.removesuffix(")").partition("](")
    if target.startswith("learn/"):
        return f"{title}]({target.removeprefix('learn/')})"
    return f"{title}](../{target})"
