"""Training of the front end: pictures of one scene, and what makes points found again and told apart."""
