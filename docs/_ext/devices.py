"""The ``device-table`` directive: the accelerators that plans know, figures and their sources."""

from sphinx.util.docutils import SphinxDirective

from sharding.plan.machine._devices import KINDS

_HEADER = "target | memory, GB | GB/s | bf16 TFLOP/s | link, GB/s | to its host, GB/s | source"


class DeviceTable(SphinxDirective):
    """A row for each kind, as targets name it."""

    def run(self):
        """A table."""
        rows = [_HEADER, " | ".join(["---"] * 7)]
        for kind in KINDS.values():
            target = f"{kind.name}:..." if kind.tile else f"{kind.name}xN"
            host = "?" if kind.host_link is None else f"{kind.host_link / 1e9:.4g}"
            figures = (kind.memory / 1e9, kind.bandwidth / 1e9, kind.flops / 1e12, kind.link / 1e9)
            rows.append(
                " | ".join([f"`{target}`", *(f"{x:.4g}" for x in figures), host, kind.source])
            )
        self.env.note_reread()  # the figures are in code, not on the page
        return self.parse_text_to_nodes("\n".join(f"| {row} |" for row in rows))


def setup(app):
    """Registers the directive."""
    app.add_directive("device-table", DeviceTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
