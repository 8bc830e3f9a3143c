"""What MkDocs calls while it builds the pages."""

import re

# GitHub colours "```python no-run"; MkDocs takes only words that are valid identifiers there, and would show the fence
# marks as text.
PLAIN = re.compile(r"^(\s*)(`{3,}|~{3,})python no-run\s*$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Returns the page with the fences that are not to be run written as MkDocs wants them."""
    return PLAIN.sub(r"\1\2{.python .no-run}", markdown)
