"""Pages that tests open with what their drawings write: each text, and where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from click.testing import CliRunner

from torch_dcpx.cli.app import app


def run(*args: object) -> None:
    result = CliRunner().invoke(app, [*map(str, args)])
    assert "wrote" in result.stdout, result.output


# Keeps the texts of drawings, and where each is.
TEXTS = """
    window.texts = [];
    const write = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...more) {
        if (this.canvas.isConnected) {
            const at = this.getTransform().transformPoint({ x, y });
            const ratio = this.canvas.width / this.canvas.clientWidth;
            const { width } = this.measureText(text);
            const kind = this.canvas.closest(".chart").className;
            texts.push([kind, text, at.x / ratio, at.y / ratio, width]);
        }
        return write.call(this, text, x, y, ...more);
    };"""


def texts_of(page: Any, kind: str) -> list[tuple[str, float, float, float]]:
    """Returns the texts of a drawing: each with its left, its middle and its width, in pixels."""
    page.wait_for_function("(kind) => texts.some(([name]) => name.includes(kind))", arg=kind)
    return [tuple(one[1:]) for one in page.evaluate("texts") if kind in one[0]]


def opened(page: Any, path: Path, width: int = 1280) -> Any:
    page.add_init_script(TEXTS)
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(path.as_uri())
    return page
