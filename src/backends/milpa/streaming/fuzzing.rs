//! What a client and a cell may send of HTTP, as any bytes. For kiyot-fuzz alone.

use super::{
    answer::{MAX_BODY, Rest},
    head,
};

/// Reads a request's head, whole and byte by byte: both must say the same.
///
/// # Panics
/// If they don't.
pub fn request(bytes: &[u8]) {
    let whole = head::request(bytes, 0);
    if let Ok(Some(read)) = &whole {
        let again = head::request(&read.retargeted(bytes, "/other"), 0);
        assert!(
            matches!(&again, Ok(Some(again)) if again.target == "/other" && again.method == read.method),
            "{again:?}"
        );
        let _ = read.token();
    }
    for end in 0..bytes.len() {
        match head::request(&bytes[..end], end.saturating_sub(1)) {
            Ok(None) => {}
            found => return assert_eq!(found, whole, "of the first {end} bytes"),
        }
    }
}

/// Reads an answer's head, and follows its body to its end.
///
/// # Panics
/// If more is taken for the body than there is, or than is allowed.
pub fn answer(bytes: &[u8]) {
    let Ok(Some(head)) = head::answer(bytes, 0) else { return };
    let body = &bytes[head.length..];
    let (mut whole, mut by_bytes) = (Rest::new(head.body), Rest::new(head.body));
    let taken = whole.take(body).len();
    assert!(taken <= body.len() && taken as u64 <= MAX_BODY);
    let one_by_one = body
        .iter()
        .take_while(|byte| {
            !by_bytes.is_over() && by_bytes.take(std::slice::from_ref(byte)).len() == 1
        })
        .count();
    assert_eq!((one_by_one, by_bytes.is_over()), (taken, whole.is_over()));
}

/// Takes the URL of a cell's streaming server apart. Its target is such as a request can have.
///
/// # Panics
/// If it isn't.
pub fn url(bytes: &[u8]) {
    let Some((port, target)) = std::str::from_utf8(bytes).ok().and_then(super::taken_apart) else {
        return;
    };
    assert_ne!(port, 0);
    let Ok(Some(head)) = head::request(b"POST /token HTTP/1.1\r\n\r\n", 0) else { return };
    let sent = head.retargeted(b"POST /token HTTP/1.1\r\n\r\n", &target);
    let read = head::request(&sent, 0);
    assert!(matches!(&read, Ok(Some(read)) if read.target == target), "{target:?}: {read:?}");
}
