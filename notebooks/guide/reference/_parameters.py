"""Generator of notebook_parameters.md: `python notebooks/guide/reference/_parameters.py`."""

from pathlib import Path

from labkit.jobs.parameters import declared

HEAD = """# Parameters of the notebooks

Each table lists the cell `parameters` of one notebook. `labkit run NOTEBOOK -p NAME VALUE` sets a
parameter, and `labkit run NOTEBOOK --help` prints the same list. Long defaults are cut at `…`.
`python notebooks/guide/reference/_parameters.py` writes this page.
"""


def page(notebooks: Path) -> str:
    """Return a Markdown page with one table of parameters per notebook."""
    parts = [HEAD]
    for notebook in sorted(notebooks.glob("*.ipynb")):
        parts += [f"## [{notebook.stem}](../../{notebook.name})\n", table(notebook)]
    return "\n".join(parts)


def table(notebook: Path) -> str:
    """Return a notebook's parameters as a Markdown table."""
    rows = ["| parameter | type | default | comment |", "|---|---|---|---|"]
    for name, parameter in declared(notebook).items():
        default = repr(parameter.default)
        default = default if len(default) <= 80 else f"{default[:79]}…"
        cells = (f"`{name}`", f"`{parameter.annotation}`", f"`{default}`", parameter.help)
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    guide = Path(__file__).parent
    (guide / "notebook_parameters.md").write_text(page(guide.parents[1]))
