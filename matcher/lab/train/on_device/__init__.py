"""Training pairs made on the device that trains: cut from views, changed, described, labelled in batches."""
