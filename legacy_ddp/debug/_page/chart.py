"""Record of a chart, its colours, and the axis of steps which all charts share. Needs bokeh."""

from dataclasses import dataclass, field

from bokeh.models import BasicTickFormatter, CrosshairTool, Range1d, Span
from bokeh.plotting import figure

LEFT, RIGHT, HEIGHT = 190, 120, 220
GREY, BLACK, VERMILLION = "#767676", "#000000", "#d55e00"
WHITE, LIGHT, SKY = "#ffffff", "#e8e8e8", "#56b4e9"
BLUES = ("#dbe9f6", "#9dc6e0", "#4a98c9", "#17509a")
BROWNS = ("#ffe9a8", "#fdae4b", "#d95f0e", "#7f2704")


@dataclass(frozen=True)
class Chart:
    """A figure with title and captions. Without a figure the captions give the reason.

    ``swatches``: colours with their labels. ``table``: rows, the first of them the header.
    """

    title: str
    captions: tuple[str, ...]
    plot: figure | None = None
    swatches: tuple[tuple[str, str], ...] = ()
    table: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Axis:
    """The axis of steps, shared by all charts: panning and the line at the pointer apply to every chart."""

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
            # Equal borders align the steps of all charts.
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
