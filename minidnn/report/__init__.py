"""What people look at: text tables, plots of timelines and memory maps, and one self-contained HTML page."""

from minidnn.report.html import html_report
from minidnn.report.plots import memory_map, timeline_plot
from minidnn.report.tables import modes_table, text_table

__all__ = ["html_report", "memory_map", "modes_table", "text_table", "timeline_plot"]
