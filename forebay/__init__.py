"""Import name of Forebay. The packages are links to the top-level directories; a wheel contains their files."""
