"""One page of HTML about a run, or about the differences of two; drawn with bokeh.

write_page → series → binning → heatmap_charts (line_charts, heatmap) → render

Imported by the command. Imports the traces and their comparison.
"""
