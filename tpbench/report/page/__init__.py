"""The HTML report: `html_page` fills the templates of this folder, which escape all text of rows."""
