//! The size of a root volume for a pod's ephemeral storage.

use crate::request::MAX_VOLUME_GIB;

/// Bytes of a GiB.
pub const GIB: u64 = 1 << 30;

/// Room for the images of a pod, in GiB: their layers, packed and unpacked, in addition to the free
/// space of the system's volume.
const POD_IMAGES_GIB: u64 = 4;

/// Requests of ephemeral storage beyond the largest root volume.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "requests of {storage_gib} GiB of ephemeral-storage: need a root volume of {needed_gib} GiB, \
     with the room for system and images; allowed: at most {MAX_VOLUME_GIB} GiB"
)]
pub struct TooMuchStorage {
    storage_gib: u64,
    needed_gib: u64,
}

/// Returns the size in GiB of a root volume for these bytes of ephemeral storage, on an image whose
/// own volume has `image_gib`. `None` for no requests.
pub fn size(storage: u64, image_gib: u64) -> Result<Option<u64>, TooMuchStorage> {
    if storage == 0 {
        return Ok(None);
    }
    let storage_gib = storage.div_ceil(GIB);
    let needed_gib = storage_gib.saturating_add(image_gib).saturating_add(POD_IMAGES_GIB);
    match needed_gib <= MAX_VOLUME_GIB {
        true => Ok(Some(needed_gib)),
        false => Err(TooMuchStorage { storage_gib, needed_gib }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verifies V109.
    #[test]
    fn volume_has_room_for_requests_system_and_images() {
        assert_eq!(size(0, 8), Ok(None));
        assert_eq!(size(1, 8), Ok(Some(13)));
        assert_eq!(size(20 << 30, 8), Ok(Some(32)));
        assert_eq!(size((20 << 30) + 1, 0), Ok(Some(25)));
        assert_eq!(size((65_536 - 12) << 30, 8), Ok(Some(65_536)));
        let error = size((65_536 - 11) << 30, 8).unwrap_err().to_string();
        assert_eq!(
            error,
            "requests of 65525 GiB of ephemeral-storage: need a root volume of 65537 GiB, with the \
             room for system and images; allowed: at most 65536 GiB"
        );
        assert!(size(u64::MAX, u64::MAX).is_err());
    }
}
