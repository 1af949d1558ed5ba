"""Write the pages that are made from the code.

python -m tests.docs        write docs/flags.md, docs/api.md, docs/cheatsheet.md, docs/gallery.md and the measured parts of the other pages
"""

from __future__ import annotations

from tests.docs import pages


def main() -> None:
    """Write every page, and say which ones changed."""
    for path, text in pages.written().items():
        changed = not path.exists() or path.read_text(encoding="utf-8") != text
        path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(pages.ROOT)}: {'written' if changed else 'as it was'}")


if __name__ == "__main__":
    main()
