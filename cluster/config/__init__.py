"""The configuration file of a site, and what a new site begins with."""
