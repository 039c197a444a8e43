"""What do all charts of a page share? Needs bokeh."""

from dataclasses import dataclass, field

from bokeh.models import BasicTickFormatter, CrosshairTool, Range1d, Span
from bokeh.plotting import figure

LEFT, RIGHT, HEIGHT = 190, 120, 220
GREY, BLACK, VERMILLION = "#767676", "#000000", "#d55e00"


@dataclass(frozen=True)
class Chart:
    """A figure with the words around it; without one the words say why. ``swatches``: colours and what they mean."""

    title: str
    words: tuple[str, ...]
    plot: figure | None = None
    swatches: tuple[tuple[str, str], ...] = ()
    table: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Axis:
    """The steps, which all charts show together: panning one pans all, and the pointer is marked in all."""

    steps: Range1d
    pointer: Span = field(default_factory=lambda: Span(dimension="height", line_color=GREY, line_dash="dotted"))

    @staticmethod
    def over(first: float, last: float) -> "Axis":
        return Axis(Range1d(first, last, bounds="auto"))

    def plot(self, y_label: str, height: int = HEIGHT, **more: object) -> figure:
        plot = figure(
            x_range=self.steps,
            frame_height=height,
            sizing_mode="stretch_width",
            # The same on all sides of all charts, so that a step is in the same place everywhere.
            min_border_left=LEFT,
            min_border_right=RIGHT,
            tools="pan,box_zoom,wheel_zoom,reset,save",
            active_drag="box_zoom",
            active_scroll=None,
            x_axis_label="step",
            y_axis_label=y_label,
            background_fill_color="#ffffff",
            toolbar_location="above",
            **more,
        )
        plot.add_tools(CrosshairTool(overlay=self.pointer))
        plot.toolbar.logo = None
        plot.xaxis.formatter = BasicTickFormatter(use_scientific=False)
        plot.xaxis.ticker.min_interval = 1
        plot.grid.grid_line_color = "#e5e5e5"
        plot.outline_line_color = "#b0b0b0"
        for axis in plot.axis:
            axis.axis_label_text_font_style = "normal"
            axis.axis_label_text_font_size = axis.major_label_text_font_size = "12px"
            axis.axis_label_text_color = axis.major_label_text_color = "#222222"
        return plot
