"""E79: loops over time and higher-order scans."""
