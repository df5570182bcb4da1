//! The committed C header is what cbindgen makes of the sources. `make header` writes it.

use std::path::Path;

use cbindgen::{Builder, Config, DocumentationStyle, Language, Style};

const NOTICE: &str =
    "/* The C interface of llm_datadist. Generated from crates/capi/src/abi; `make header` writes it. */";

fn generated() -> String {
    let config = Config {
        language: Language::C,
        cpp_compat: true,
        style: Style::Type,
        documentation_style: DocumentationStyle::Doxy,
        include_guard: Some("LLM_DATADIST_LLM_DATADIST_C_H_".into()),
        header: Some(NOTICE.into()),
        no_includes: true,
        sys_includes: ["stdbool.h", "stddef.h", "stdint.h"].map(String::from).to_vec(),
        usize_is_size_t: true,
        line_length: 110,
        tab_width: 2,
        ..Config::default()
    };
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/abi");
    let builder = Builder::new().with_config(config);
    let builder = builder.with_src(sources.join("mod.rs")); // and the modules it names
    let mut text = Vec::new();
    builder.generate().unwrap().write(&mut text);
    String::from_utf8(text).unwrap()
}

#[test]
fn the_committed_header_is_the_generated_one() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/llm_datadist/llm_datadist_c.h");
    let now = generated();
    if std::env::var_os("LLM_DATADIST_WRITE_HEADER").is_some() {
        std::fs::write(&path, &now).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap();
    assert!(now.contains("uint32_t llm_datadist_copy_cache("), "the generator found nothing: {now}");
    assert!(now == committed, "crates/capi/include is stale: run `make header`");
}
