"""From a call to its plan, and how a plan is carried out."""
