"""A page of HTML about one run, or about two runs and their differences, drawn with bokeh."""
