"""Pairs of images: a page that shows ``NAME-light.svg`` shows ``NAME-dark.svg`` in its dark mode."""

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

ENDS = ("-light.svg", "-dark.svg")


class DarkImages(SphinxTransform):
    """Add the dark image beside the light image, each with the class of the theme for its mode."""

    default_priority = 400  # before Sphinx copies the images of a page

    def apply(self, **_: Any) -> None:
        """Change the images of this page."""
        for image in [item for item in self.document.findall(nodes.image) if item["uri"].endswith(ENDS[0])]:
            dark = image.deepcopy()
            dark["uri"] = image["uri"].removesuffix(ENDS[0]) + ENDS[1]
            image["classes"] += ["chart", "only-light"]
            dark["classes"] += ["chart", "only-dark"]
            image.parent.insert(image.parent.index(image) + 1, dark)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the transform."""
    app.add_transform(DarkImages)
    return {"parallel_read_safe": True, "version": "1"}
