"""Shows ``NAME_dark.png`` instead of ``NAME.png`` on dark pages, where there is one."""

import pathlib

from docutils import nodes
from sphinx.transforms import SphinxTransform


class DarkPictures(SphinxTransform):
    """Adds the dark image after the light one; the theme hides one of the two."""

    default_priority = 500

    def apply(self):
        """Changes a page."""
        folder = pathlib.Path(self.env.doc2path(self.env.docname)).parent
        for image in list(self.document.findall(nodes.image)):
            light = pathlib.Path(image["uri"])
            dark = light.with_stem(f"{light.stem}_dark")
            if (folder / dark).exists():
                other = image.deepcopy()
                other["uri"] = str(dark)
                image["classes"].append("only-light")
                other["classes"].append("only-dark")
                image.parent.insert(image.parent.index(image) + 1, other)


def setup(app):
    """Connects it."""
    app.add_transform(DarkPictures)
    return {"parallel_read_safe": True}
