"""What people look at: text tables, plots of timelines and memory maps, and one self-contained HTML page."""

from minidnn.report.html import html_report
from minidnn.report.plots import memory_map, timeline_plot
from minidnn.report.tables import compression_table, densities_table, modes_table, sparkline, text_table

__all__ = [
    "compression_table", "densities_table", "html_report", "memory_map", "modes_table", "sparkline", "text_table",
    "timeline_plot",
]  # fmt: skip
