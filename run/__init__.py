"""What all other folders use: what a run is on disk and on a machine."""
