"""A page of HTML about one run, or about two runs and their differences, drawn with bokeh.

``series`` reads the traces, the chart modules draw, ``render`` fills the template, ``write_page`` writes the file.
Imported by the command. Imports the traces and their comparison.
"""
