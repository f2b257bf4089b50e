"""Drawing of arrays with matplotlib, without pyplot: styles, curves, histograms."""
