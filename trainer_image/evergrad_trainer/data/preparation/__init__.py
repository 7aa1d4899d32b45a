"""How a source file becomes prepared data; ``evergrad_trainer.data.prepare`` is the way in."""
