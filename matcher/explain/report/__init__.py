"""The self-contained HTML report: its data, and the page that shows them."""
