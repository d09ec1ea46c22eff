"""Pictures on dark pages, ``NAME_dark.png`` where there is one, and wide ones on phones."""

import pathlib

from docutils import nodes
from sphinx.transforms import SphinxTransform


class Images(SphinxTransform):
    """Adds the dark image after the light one: the theme hides one of the two. Names wide ones."""

    default_priority = 500

    def apply(self):
        """Changes a page."""
        for image in list(self.document.findall(nodes.image)):
            path = pathlib.Path(self.env.relfn2path(image["uri"])[1])
            if path.suffix == ".png" and path.exists():
                width = int.from_bytes(path.read_bytes()[16:20])
                image["classes"] += ["wide"] * (width > 1000)  # several plots beside each other
            if path.with_stem(f"{path.stem}_dark").exists():
                dark = image.deepcopy()
                dark["uri"] = image["uri"].replace(".png", "_dark.png")
                image["classes"].append("only-light")
                dark["classes"].append("only-dark")
                image.parent.insert(image.parent.index(image) + 1, dark)


def setup(app):
    """Connects it."""
    app.add_transform(Images)
    return {"parallel_read_safe": True}
