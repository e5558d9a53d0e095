//! The field reference of the resource, as Markdown, from the same schema that the API server enforces.
