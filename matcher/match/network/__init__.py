"""The attentional network: position, context, assignment, and the model that composes them."""
