"""One page of HTML about a run, or about the differences of two; drawn with bokeh.

page → series → sampling → pictures (line_charts, heatmaps) → render
"""
