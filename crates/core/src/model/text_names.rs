//! The names that programs give to engines and caches.

/// Maximum number of bytes of the name of an engine or a cache.
pub const MAX_NAME: usize = 128;

/// Whether `text` may be the name of an engine or a cache: at most [`MAX_NAME`] bytes of text that stays in its line of a
/// message or a log.
pub fn is_name(text: &str) -> bool {
    text.len() <= MAX_NAME && !text.chars().any(breaks_line)
}

/// Whether a character is a control character, ends a line, or changes the direction of the text around it.
fn breaks_line(letter: char) -> bool {
    letter.is_control()
        || matches!(
            letter,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        )
}
