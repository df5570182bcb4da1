// A browser does not let a page that was opened as a file read the search index. Say so, instead of finding nothing.
if (location.protocol === "file:") {
  for (const button of document.querySelectorAll(".md-search__button")) {
    button.disabled = true;
    button.textContent = "Search needs a web server";
    button.title = "Run: python3 -m http.server --directory target/docs, and open http://localhost:8000";
  }
}
